"""What is known about requests: receipts, metrics, logs, traces and events. Imports `base`."""
