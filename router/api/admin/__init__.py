"""The admin API: engines, strategies, migration, receipts. FastAPI routers."""
