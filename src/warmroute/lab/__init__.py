"""What never runs in production: the router's core in virtual time, simulated engines, workloads, other routers' rules.

    run.py                 one run: a workload, a fleet, a policy
    world.py               a fleet in virtual time: nodes, clients, faults
    simulated_router.py    production's core, fed with events in virtual time
    request_flow.py        a simulated request: it sends the events of an edge, and obeys the core's commands
    engine/                the simulated engine, in virtual time and as a server (`warmroute engine`)
    workloads/             traces and generated workloads
    peers/                 other routers' and scalers' rules
    planning/              scaling by replay: the search that `serve` starts as a child process
    summary.py, report.py, html_report.py   what a run measured
    sizing.py              `warmroute plan`
    load.py, demo/         load for a real endpoint; `warmroute demo`

No process that serves requests imports it. The commands in app/commands do, when they run.
"""
