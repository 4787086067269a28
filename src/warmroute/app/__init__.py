"""The application: the router's processes, put together from all rooms, and what an operator sees of them: commands,
admin API, live page, metrics, alerts, captures, traces.
"""
