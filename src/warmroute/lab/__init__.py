"""The lab: production's core in virtual time. Replay runs workloads through simulated fleets, `warmroute engine`
simulates vLLM without a GPU, and the demo starts both as real processes. A process that serves never imports it.
"""
