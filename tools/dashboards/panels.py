"""What a dashboard of ours is made of, and how Grafana's own library writes it as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DashboardLinkType,
    DataSourceRef,
    VariableRefresh,
    VariableSort,
)
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

TAG = "neoflex"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_STAT_HEIGHT, _GRAPH_HEIGHT = 4, 8

PLANNER = 'instance=~"$planner"'
"""Series of the planners that are chosen at the top."""
CLASS = 'instance=~"$planner",service_class=~"$class"'
"""And of the service classes."""
HOST = 'instance=~"$host"'
"""Series of the CPU attention services that are chosen at the top."""


class Look(Enum):
    """How a panel draws its series."""

    LINES = "lines"
    STACKED = "stacked"
    SHARES = "shares"
    """Stacked to 100 %."""
    NUMBER = "number"
    """The latest value, in large digits."""
    HEATMAP = "heatmap"
    """A histogram's buckets over time."""


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""
    """With {{label}} for labels; the panel's title where it is empty."""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    text: str
    """What it shows, and what to make of it."""
    unit: str
    """Grafana's name of it, e.g. "s", "reqps", "percentunit"."""
    queries: Sequence[Query]
    look: Look = Look.LINES
    width: int = 8
    """Of 24."""
    least: float | None = 0
    """Where the axis begins."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True, slots=True)
class Page:
    """A dashboard."""

    uid: str
    title: str
    text: str
    variables: Sequence[str]
    """Of VARIABLES."""
    rows: Sequence[Row]


VARIABLES = {
    "planner": ("Planner", "label_values(neoflex_num_requests_running, instance)"),
    "class": ("Service class", "label_values(neoflex_requests_by_class, service_class)"),
    "host": ("CPU attention", "label_values(neoflex_cpu_attention_threads, instance)"),
}
"""By name the label, and the query of the values to choose from."""


def quantiles(metric: str, labels: str, percentiles: Sequence[int] = (50, 95, 99)) -> list[Query]:
    """Of a histogram, over all its series."""
    rates = f"sum by (le) (rate({metric}_bucket{{{labels}}}[$__rate_interval]))"
    return [Query(f"histogram_quantile({percent / 100:g}, {rates})", f"p{percent}") for percent in percentiles]


def rate(metric: str, labels: str, by: str = "") -> str:
    """Of a counter, summed, per second."""
    rates = f"rate({metric}{{{labels}}}[$__rate_interval])"
    return f"sum by ({by}) ({rates})" if by else f"sum({rates})"


def share(metric: str, labels: str, part: str, by: str = "") -> str:
    """Of a counter, the part of its rate that has these labels besides."""
    return f"{rate(metric, f'{labels},{part}', by)} / {rate(metric, labels, by)}"


def mean(metric: str, labels: str, by: str = "") -> str:
    """Of a histogram's observations."""
    return f"{rate(f'{metric}_sum', labels, by)} / {rate(f'{metric}_count', labels, by)}"


def or_zero(expr: str) -> str:
    """For what may never happen: nothing is shown as 0 rather than as no data."""
    return f"{expr} or vector(0)"


def to_json(page: Page) -> str:
    """The file that Grafana is provisioned with."""
    builder = (
        dashboard.Dashboard(page.title)
        .uid(page.uid)
        .description(page.text)
        .tags([TAG])
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("10s")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .link(
            dashboard.DashboardLink("NeoFlex")
            .type(DashboardLinkType.DASHBOARDS)
            .tags([TAG])
            .keep_time(True)
            .include_vars(True)
        )
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name in page.variables:
        label, query = VARIABLES[name]
        builder.with_variable(
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(_SOURCE)
            .query(query)
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    ids = count(1)
    for row in page.rows:
        builder.with_row(dashboard.Row(row.title).id(next(ids)))
        for panel in row.panels:
            builder.with_panel(_panel(panel).id(next(ids)))
    return json.dumps(builder.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel) -> stat.Panel | timeseries.Panel | heatmap.Panel:
    if panel.look is Look.NUMBER:
        return _number(panel)
    return _heatmap(panel) if panel.look is Look.HEATMAP else _graph(panel)


def _number(panel: Panel) -> stat.Panel:
    built = (
        stat.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_STAT_HEIGHT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    )
    for target in _targets(panel):
        built.with_target(target)
    return built


def _heatmap(panel: Panel) -> heatmap.Panel:
    (target,) = _targets(panel)
    return (
        heatmap.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_SOURCE)
        .calculate(False)
        .color(heatmap.HeatmapColorOptions().mode(HeatmapColorMode.SCHEME).scheme("Oranges").steps(64))
        .y_axis(heatmap.YAxisConfig().unit(panel.unit))
        .span(panel.width)
        .height(_GRAPH_HEIGHT)
        .with_target(target.format(PromQueryFormat.HEATMAP))
    )


def _graph(panel: Panel) -> timeseries.Panel:
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.text)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .span(panel.width)
        .height(_GRAPH_HEIGHT)
        .show_points(VisibilityMode.NEVER)
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    if panel.least is not None:
        built.min(panel.least)
    if panel.look is not Look.LINES:
        mode = StackingMode.PERCENT if panel.look is Look.SHARES else StackingMode.NORMAL
        built.stacking(common.StackingConfig().mode(mode)).fill_opacity(60)
    for target in _targets(panel):
        built.with_target(target)
    return built


def _targets(panel: Panel) -> list[prometheus.Dataquery]:
    return [
        prometheus.Dataquery()
        .expr(query.expr)
        .legend_format(query.legend or panel.title)
        .ref_id(chr(ord("A") + index))
        .range()
        for index, query in enumerate(panel.queries)
    ]
