"""Panels of a Grafana dashboard as data, laid out in rows from left to right."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

GRID_COLUMNS = 24  # Grafana's own
PANEL_HEIGHT = 8
ROW_HEIGHT = 1
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression, and the name of each series that it gives."""

    expression: str
    legend: str
    has_exemplars: bool = False  # values that lead to their traces


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time. `unit` is one of Grafana's: s, percentunit, reqps, ops, short, cps."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    maximum: float | None = None
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A heading, and the panels below it, which share the width."""

    title: str
    panels: tuple[Panel, ...]


def laid_out(rows: Sequence[Row]) -> Iterator[Json]:
    """Yield Grafana's panels, each with an id and a place."""
    top, number = 0, 0
    for row in rows:
        number += 1
        yield _heading(row, number, top)
        top += ROW_HEIGHT
        width = GRID_COLUMNS // len(row.panels)
        for column, panel in enumerate(row.panels):
            number += 1
            place = {"h": PANEL_HEIGHT, "w": width, "x": column * width, "y": top}
            yield _graph(panel, number, place)
        top += PANEL_HEIGHT


def _heading(row: Row, number: int, top: int) -> Json:
    place = {"h": ROW_HEIGHT, "w": GRID_COLUMNS, "x": 0, "y": top}
    return {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": place, "panels": []}


def _graph(panel: Panel, number: int, place: Json) -> Json:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [_target(query, chr(ord("A") + place)) for place, query in enumerate(panel.queries)],
    }


def _field(panel: Panel) -> Json:
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    custom = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 5,
        "showPoints": "never",
        "spanNulls": False,
        "stacking": stacking,
    }
    limits = {"min": 0} if panel.maximum is None else {"min": 0, "max": panel.maximum}
    return {"unit": panel.unit, "color": {"mode": "palette-classic"}, "custom": custom, **limits}


def _target(query: Query, reference: str) -> Json:
    return {
        "refId": reference,
        "datasource": DATASOURCE,
        "editorMode": "code",
        "expr": query.expression,
        "legendFormat": query.legend,
        "range": True,
        "exemplar": query.has_exemplars,
    }
