"""Processes and people: the command, the service, and what operators look at.

    main.py, commands/     the `warmroute` command
    service.py             one router process: all parts built, connected, started and stopped
    startup.py, reload.py, process.py   checks before the start; a new configuration; memory, signals, systemd
    admin.py, live_page.py              the admin API; the live page's files and feed
    metrics/, monitoring/  the metrics page; the dashboard and the alert rules, as files
    alerts.py, hit_rate.py, prompt_doctor/   what is wrong now; why caches are not hit
    journal.py, capture.py, tracing.py       what is kept of requests. ended_calls.py hands it out
    doctor/                `warmroute doctor`
    edge_processes.py, brain_server.py, edge_service.py   `serve --edges`: the parent, the brain, an edge
    replicas/, redis.py    several routers that share their state through Redis

It may import every other room, and none imports it. Only commands/ imports lab, and only inside functions.
"""
