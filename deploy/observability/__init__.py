"""What Prometheus and Grafana are told about specdec: `python -m deploy.observability` writes the generated files."""
