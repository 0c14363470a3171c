"""Generated from proto/specdec/v1 by `make protos`; never edited."""
