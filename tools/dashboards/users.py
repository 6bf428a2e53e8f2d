"""What those who send requests get: latency, targets, errors, tokens."""

from panels import CLASS, PLANNER, Look, Page, Panel, Query, Row, mean, or_zero, quantiles, rate, share

_SLO = "neoflex_requests_by_slo_total"
_IN_TIME = rate(_SLO, f'{CLASS},outcome="in_time"')
_FINISHED = rate("neoflex_request_success_total", CLASS)
_FAILED = or_zero(rate("neoflex_request_failure_total", CLASS))
_REFUSED = or_zero(rate("neoflex_refused_requests_total", PLANNER))
_TTFT = "neoflex_time_to_first_token_seconds"
_GAP = "neoflex_inter_token_latency_seconds"
_HTTP = "http_server_request_duration_seconds"
_CALLS = 'http_route!~"/metrics|/health.*"'
"""Not what machines ask all the time."""

_NOW = Row(
    "Now",
    [
        Panel("Answers", "Answers that ended well.", "reqps", [Query(_FINISHED)], Look.NUMBER, 4),
        Panel("Goodput", "Answers with both targets met.", "reqps", [Query(or_zero(_IN_TIME))], Look.NUMBER, 4),
        Panel(
            "In time",
            "Of the requests with targets, those that met both; late ones and those refused for lateness did not.",
            "percentunit",
            [Query(share(_SLO, CLASS, 'outcome="in_time"'))],
            Look.NUMBER,
            4,
        ),
        Panel(
            "Errors",
            "Of all that came, what was refused or failed, callers that went away among them.",
            "percentunit",
            [Query(f"(({_FAILED}) + ({_REFUSED})) / (({_FAILED}) + ({_REFUSED}) + {_FINISHED})")],
            Look.NUMBER,
            4,
        ),
        Panel("TTFT, p95", "Time to the first token.", "s", quantiles(_TTFT, CLASS, (95,)), Look.NUMBER, 4),
        Panel(
            "Between tokens, p95", "From each token to the next.", "s", quantiles(_GAP, CLASS, (95,)), Look.NUMBER, 4
        ),
    ],
)

_LATENCY = Row(
    "Latency",
    [
        Panel("Time to the first token", "From arrival at the planner.", "s", quantiles(_TTFT, CLASS)),
        Panel(
            "Between tokens", "From each token to the next, as clients see answers flow.", "s", quantiles(_GAP, CLASS)
        ),
        Panel(
            "Whole answers", "From arrival to the end.", "s", quantiles("neoflex_e2e_request_latency_seconds", CLASS)
        ),
        Panel(
            "Time to the first token, all of them",
            "How many requests had their first token within each time.",
            "s",
            [Query(rate(f"{_TTFT}_bucket", CLASS, "le"), "{{le}}")],
            Look.HEATMAP,
        ),
        Panel(
            "Where a request's time goes",
            "Means: waiting for its first plan, computing the prompt, generating.",
            "s",
            [
                Query(mean("neoflex_request_queue_time_seconds", CLASS), "queue"),
                Query(mean("neoflex_request_prefill_time_seconds", CLASS), "prefill"),
                Query(mean("neoflex_request_decode_time_seconds", CLASS), "decode"),
            ],
            Look.STACKED,
        ),
        Panel(
            "Time to the first token by class, p95",
            "Classes of a higher priority go first.",
            "s",
            [
                Query(
                    f"histogram_quantile(0.95, {rate(f'{_TTFT}_bucket', CLASS, 'le, service_class')})",
                    "{{service_class}}",
                )
            ],
        ),
    ],
)

_TARGETS = Row(
    "Targets",
    [
        Panel(
            "Requests with targets",
            "In time, late, or refused at once because they would have been late.",
            "reqps",
            [Query(rate(_SLO, CLASS, "outcome"), "{{outcome}}")],
            Look.STACKED,
        ),
        Panel(
            "In time by class",
            "Of the requests with targets.",
            "percentunit",
            [
                Query(share(_SLO, CLASS, 'outcome="in_time"', "service_class"), "{{service_class}}"),
            ],
        ),
        Panel(
            "Missed targets by kind",
            "ttft: the first token came late; tpot: the others came too slowly.",
            "percentunit",
            [
                Query(share("neoflex_slo_targets_total", CLASS, 'outcome="missed"', "kind"), "{{kind}}"),
            ],
        ),
        Panel(
            "Error budget spent, times the sustainable rate",
            "1 spends the budget of rules.yml, 5 % of the requests, exactly; alerts are at 6 and 14.4.",
            "none",
            [
                Query("neoflex:slo_burn:5m", "{{service_class}}, 5 min"),
                Query("neoflex:slo_burn:1h", "{{service_class}}, 1 h"),
            ],
            width=24,
        ),
    ],
)

_ERRORS = Row(
    "Errors",
    [
        Panel(
            "Refused at the door",
            "By reason. QUEUE_FULL and the UNREACHABLE ones are overload; the others are the callers' mistakes.",
            "reqps",
            [Query(rate("neoflex_refused_requests_total", PLANNER, "reason"), "{{reason}}")],
            Look.STACKED,
        ),
        Panel(
            "Failed after they were accepted",
            "By reason, callers that went away among them.",
            "reqps",
            [Query(rate("neoflex_request_failure_total", CLASS, "reason"), "{{reason}}")],
            Look.STACKED,
        ),
        Panel(
            "HTTP",
            "Answers of the gateway by status.",
            "reqps",
            [
                Query(
                    rate(f"{_HTTP}_count", _CALLS, "http_response_status_code"),
                    "{{http_response_status_code}}",
                )
            ],
            Look.STACKED,
        ),
        Panel(
            "HTTP by route, p95",
            "From arrival at the gateway to the end of the answer.",
            "s",
            [
                Query(
                    f"histogram_quantile(0.95, {rate(f'{_HTTP}_bucket', _CALLS, 'le, http_route')})",
                    "{{http_route}}",
                )
            ],
        ),
        Panel(
            "HTTP requests that run",
            "At the gateway, streams among them.",
            "none",
            [Query("sum by (instance) (http_server_active_requests)", "{{instance}}")],
        ),
        Panel(
            "Answers by why they ended",
            "stop, length, and so on.",
            "reqps",
            [Query(rate("neoflex_request_success_total", CLASS, "finished_reason"), "{{finished_reason}}")],
            Look.STACKED,
        ),
    ],
)

_TOKENS = Row(
    "Tokens",
    [
        Panel(
            "Tokens a second",
            "Of prompts as they are computed, and of answers.",
            "none",
            [
                Query(rate("neoflex_prompt_tokens_total", PLANNER), "prompts"),
                Query(rate("neoflex_generation_tokens_total", PLANNER), "answers"),
            ],
        ),
        Panel(
            "Tokens of a request",
            "Medians and the 95th percentile, of prompts and answers.",
            "none",
            [
                Query(
                    f"histogram_quantile({share}, sum by (le, gen_ai_token_type)"
                    f" (rate(gen_ai_client_token_usage_bucket{{{PLANNER}}}[$__rate_interval])))",
                    f"{{{{gen_ai_token_type}}}}, p{share * 100:.0f}",
                )
                for share in (0.5, 0.95)
            ],
        ),
        Panel(
            "By model and operation",
            "Requests, as the GenAI conventions count them.",
            "reqps",
            [
                Query(
                    rate(
                        "gen_ai_server_request_duration_seconds_count",
                        PLANNER,
                        "gen_ai_operation_name, gen_ai_request_model",
                    ),
                    "{{gen_ai_operation_name}} {{gen_ai_request_model}}",
                )
            ],
            Look.STACKED,
        ),
    ],
)

PAGE = Page(
    "neoflex-users",
    "NeoFlex: users",
    "What those who send requests get. docs/runbook.md says what to do about it.",
    ("planner", "class"),
    (_NOW, _LATENCY, _TARGETS, _ERRORS, _TOKENS),
)
