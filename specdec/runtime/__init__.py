"""What every process of the system needs around its work: settings, logs, metrics, the gRPC server. Knows no engine, no session."""
