"""How much of each pool is needed, for who scales them: Prometheus, or KEDA through the external scaler."""
