"""Write what is generated: the dashboard from dashboard.py, and the PrometheusRule from alerts.yaml."""

from deploy.observability.generated import GENERATED

for path, text in GENERATED.items():
    path.write_text(text())
