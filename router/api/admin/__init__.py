"""The admin API: engines, strategies, migration, receipts, recorded traffic. FastAPI routers."""
