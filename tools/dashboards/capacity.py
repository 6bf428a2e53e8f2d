"""How much more there is room for: queue, KV, throughput at the limit, overload."""

from panels import CLASS, PLANNER, Look, Page, Panel, Query, Row, or_zero, quantiles, rate

_BUSY = rate("neoflex_gpu_time_seconds_total", f'{PLANNER},state!="idle"')
_WAITING = f"sum(neoflex_num_requests_waiting{{{PLANNER}}})"
_KV_USAGE = f"avg(neoflex_kv_cache_usage_perc{{{PLANNER}}})"
_FINISHED = rate("neoflex_request_success_total", PLANNER)
_RECOMPUTED = rate("neoflex_recomputed_tokens_total", PLANNER)
_PROMPT = rate("neoflex_prompt_tokens_total", PLANNER)
_CACHED = rate("neoflex_prefix_cache_hits_total", PLANNER)

_NOW = Row(
    "Now",
    [
        Panel(
            "Executor occupied",
            "Share of the time in which it has a plan, waits within it included. Near 1 there is nothing left.",
            "percentunit",
            [Query(_BUSY)],
            Look.NUMBER,
            4,
        ),
        Panel("KV in use", "Share of the blocks of both tiers.", "percentunit", [Query(_KV_USAGE)], Look.NUMBER, 4),
        Panel(
            "Queue in use",
            "Of planner.max_waiting_requests; at 1 requests are refused.",
            "percentunit",
            [Query(f"{_WAITING} / sum(neoflex_max_requests_waiting{{{PLANNER}}})")],
            Look.NUMBER,
            4,
        ),
        Panel(
            "Running",
            "Requests that hold KV.",
            "none",
            [Query(f"sum(neoflex_num_requests_running{{{PLANNER}}})")],
            Look.NUMBER,
            4,
        ),
        Panel("Waiting", "Requests without.", "none", [Query(_WAITING)], Look.NUMBER, 4),
        Panel(
            "Ready",
            "1: requests are answered. docs/runbook.md has what to do otherwise.",
            "none",
            [Query(f'min(neoflex_health{{{PLANNER},check="readiness"}})')],
            Look.NUMBER,
            4,
        ),
    ],
)

_QUEUE = Row(
    "Queue",
    [
        Panel(
            "Arrivals and ends",
            "Where more are accepted than end, the queue grows.",
            "reqps",
            [
                Query(rate("neoflex_accepted_requests_total", PLANNER), "accepted"),
                Query(_FINISHED, "ended well"),
                Query(or_zero(rate("neoflex_request_failure_total", PLANNER)), "failed"),
                Query(or_zero(rate("neoflex_refused_requests_total", PLANNER)), "refused"),
            ],
        ),
        Panel(
            "Waiting, by reason",
            "capacity: never had a turn; preempted: pushed out, to be computed again.",
            "none",
            [Query(f"sum by (reason) (neoflex_num_requests_waiting_by_reason{{{PLANNER}}})", "{{reason}}")],
            Look.STACKED,
        ),
        Panel(
            "In hand, by class",
            "Running and waiting.",
            "none",
            [
                Query(
                    f"sum by (service_class, state) (neoflex_requests_by_class{{{CLASS}}})",
                    "{{service_class}} {{state}}",
                )
            ],
            Look.STACKED,
        ),
        Panel(
            "Time in the queue",
            "From arrival to the first plan that has the request.",
            "s",
            quantiles("neoflex_request_queue_time_seconds", CLASS, (50, 95)),
        ),
        Panel(
            "Running",
            "Requests that hold KV.",
            "none",
            [Query(f"sum by (instance) (neoflex_num_requests_running{{{PLANNER}}})", "{{instance}}")],
        ),
        Panel(
            "Refused for overload",
            "Queue full, or a target out of reach.",
            "reqps",
            [
                Query(
                    or_zero(
                        rate(
                            "neoflex_refused_requests_total", f'{PLANNER},reason=~"QUEUE_FULL|.*_UNREACHABLE"', "reason"
                        )
                    ),
                    "{{reason}}",
                )
            ],
            Look.STACKED,
        ),
    ],
)

_ROOM = Row(
    "Room",
    [
        Panel(
            "KV in use",
            "Now, the most within an hour, and what it comes to in half an hour at the pace of the last one.",
            "percentunit",
            [
                Query(_KV_USAGE, "now"),
                Query(f"max(max_over_time(neoflex_kv_cache_usage_perc{{{PLANNER}}}[1h]))", "most in 1 h"),
                Query(
                    f"clamp(max(predict_linear(neoflex_kv_cache_usage_perc{{{PLANNER}}}[30m], 1800)), 0, 1)",
                    "in 30 min",
                ),
            ],
        ),
        Panel(
            "KV by tier",
            "Blocks in use.",
            "none",
            [Query(f"sum by (tier) (neoflex_kv_blocks_used{{{PLANNER}}})", "{{tier}}")],
            Look.STACKED,
        ),
        Panel(
            "Work done twice",
            "Share of computed prompt tokens that had been computed before: the price of too little KV.",
            "percentunit",
            [Query(f"{_RECOMPUTED} / ({_RECOMPUTED} + {_PROMPT})", "computed again")],
        ),
        Panel(
            "Prefix cache",
            "Share of prompt tokens that need not be computed, since an earlier request had them.",
            "percentunit",
            [Query(f"{_CACHED} / ({_CACHED} + {_PROMPT})", "hits")],
        ),
        Panel(
            "Preemptions",
            "Sequences that lost their place to another.",
            "ops",
            [Query(rate("neoflex_num_preemptions_total", PLANNER), "preemptions")],
        ),
        Panel(
            "Memory of the processes",
            "Resident; the shared region counts in each that maps it.",
            "bytes",
            [Query("sum by (job) (process_memory_usage_bytes)", "{{job}}")],
        ),
    ],
)

_THROUGHPUT = Row(
    "Throughput",
    [
        Panel(
            "Tokens a second",
            "Of prompts and of answers.",
            "none",
            [Query(_PROMPT, "prompts"), Query(rate("neoflex_generation_tokens_total", PLANNER), "answers")],
            Look.STACKED,
        ),
        Panel(
            "Requests a second at the limit",
            "What ends, over the share of time that the executor is occupied: what a full executor would end of the "
            "same mix. Batches grow with the load, so it is rather too low.",
            "reqps",
            [Query(f"{_FINISHED} / {_BUSY}", "at the limit"), Query(_FINISHED, "now")],
        ),
        Panel(
            "Executor occupied",
            "Share of the time in which it has a plan.",
            "percentunit",
            [Query(_BUSY, "occupied")],
        ),
    ],
)

PAGE = Page(
    "neoflex-capacity",
    "NeoFlex: capacity",
    "How much more there is room for, and what gives first. docs/sizing.md says what to change.",
    ("planner", "class"),
    (_NOW, _QUEUE, _ROOM, _THROUGHPUT),
)
