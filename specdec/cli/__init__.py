"""The `specdec` command. Starts services as processes and talks to them as a client; imports no service and no torch."""
