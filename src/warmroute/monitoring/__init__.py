"""Grafana's dashboard and Prometheus' alert rules, generated from the list of metrics."""
