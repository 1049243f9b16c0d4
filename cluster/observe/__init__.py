"""What Prometheus and OpenTelemetry hear.

Each replica counts for itself (`replica_metrics`), each ingress too, and any ingress shows the counts of all on one
page (`ingress_metrics`). `tracing` makes a span of a request, and of each attempt at it.
`seldom` keeps what comes often from filling the logs.
"""
