"""What GPU and CPU do: iterations, predictions, bubbles, KV, traffic, threads."""

from panels import HOST, PLANNER, Look, Page, Panel, Query, Row, mean, or_zero, quantiles, rate, share

_DURATION = "neoflex_iteration_duration_seconds"
_PREDICTED = "neoflex_iteration_predicted_duration_seconds"
_RATIO = "neoflex_iteration_predicted_over_measured"
_GPU_TIME = "neoflex_gpu_time_seconds_total"
_CPU_TIME = "neoflex_cpu_attention_time_seconds_total"
_ATTENDED = "neoflex_attended_tokens_total"

_ITERATIONS = Row(
    "Iterations",
    [
        Panel(
            "Iterations by mode",
            "What the planner chooses: one batch on the GPU, two sub-batches, one batch with the CPU beside it, or a "
            "cohort at the CPU's pace.",
            "ops",
            [Query(rate("neoflex_iterations_total", PLANNER, "mode"), "{{mode}}")],
            Look.STACKED,
        ),
        Panel(
            "Predicted and measured time, means",
            "Each pair of lines should lie together.",
            "s",
            [
                Query(mean(_DURATION, PLANNER, "mode"), "{{mode}}, measured"),
                Query(mean(_PREDICTED, PLANNER, "mode"), "{{mode}}, predicted"),
            ],
        ),
        Panel(
            "Predicted over measured",
            "1 is right. Below it iterations take longer than the planner thinks.",
            "none",
            quantiles(_RATIO, PLANNER, (10, 50, 90)),
        ),
        Panel("Measured time", "Of iterations.", "s", quantiles(_DURATION, PLANNER)),
        Panel(
            "Tokens of an iteration",
            "That pass the linear operations: decodes and chunks of prompts.",
            "none",
            quantiles("neoflex_iteration_tokens", PLANNER, (50, 95)),
        ),
        Panel(
            "Planning",
            "Share of a core that making plans takes. It runs beside the iteration before.",
            "percentunit",
            [Query(rate("neoflex_planning_time_seconds_total", PLANNER), "planning")],
        ),
    ],
)

_GPU = Row(
    "GPU",
    [
        Panel(
            "The executor's time",
            "All but busy are bubbles: wait_cpu for attention on the CPU, wait_weights for streamed layers, idle "
            "without a plan.",
            "percentunit",
            [Query(rate(_GPU_TIME, PLANNER, "state"), "{{state}}")],
            Look.SHARES,
        ),
        Panel(
            "Traffic over the link",
            "KV moved out to the host and in to the GPU, and streamed weights.",
            "Bps",
            [
                Query(rate("neoflex_swapped_bytes_total", PLANNER, "direction"), "KV {{direction}}"),
                Query(rate("neoflex_streamed_weights_bytes_total", PLANNER), "weights"),
            ],
        ),
        Panel(
            "Memory of the device",
            "Weights and KV cache.",
            "bytes",
            [Query("sum by (use) (neoflex_gpu_memory_bytes)", "{{use}}")],
            Look.STACKED,
        ),
        Panel(
            "Layers",
            "Resident on the device, or streamed to it in each iteration.",
            "none",
            [Query("sum by (place) (neoflex_model_layers)", "{{place}}")],
            Look.STACKED,
        ),
        Panel(
            "Steps of a layer, medians",
            "Of iterations that are traced now and then. Where a step takes longer than before, look there.",
            "s",
            [
                Query(
                    f"histogram_quantile(0.5, {rate('neoflex_layer_duration_seconds_bucket', PLANNER, 'le, step')})",
                    "{{step}}",
                )
            ],
        ),
        Panel(
            "Calibration",
            "What each part of the predicted cost is multiplied by, learnt while serving. 1: as measured at start.",
            "none",
            [Query(f"avg by (part) (neoflex_calibration{{{PLANNER}}})", "{{part}}")],
        ),
    ],
)

_CPU = Row(
    "CPU attention",
    [
        Panel(
            "Time of each service",
            "All but busy are bubbles: waiting for the executor within an iteration, or idle.",
            "percentunit",
            [Query(rate(_CPU_TIME, HOST, "instance, state"), "{{instance}} {{state}}")],
            Look.SHARES,
        ),
        Panel(
            "Context tokens attended",
            "By decodes, on either processor: how the work is divided.",
            "none",
            [Query(rate(_ATTENDED, PLANNER, "device"), "{{device}}")],
            Look.STACKED,
        ),
        Panel(
            "Attended on the CPU",
            "Share of all context tokens that decodes attended.",
            "percentunit",
            [Query(share(_ATTENDED, PLANNER, 'device="cpu"'), "CPU")],
        ),
        Panel(
            "Threads",
            "That compute attention, and the most there may be.",
            "none",
            [
                Query(f"neoflex_cpu_attention_threads{{{HOST}}}", "{{instance}}"),
                Query(f"neoflex_cpu_attention_max_threads{{{HOST}}}", "{{instance}}, at most"),
            ],
        ),
        Panel(
            "Hop",
            "Between executor and CPU attention, of layers for which the other side waited: there and back.",
            "s",
            [
                Query(
                    f"histogram_quantile({share}, "
                    f"{rate('neoflex_hop_latency_seconds_bucket', PLANNER, 'le, direction')})",
                    f"{{{{direction}}}}, p{share * 100:.0f}",
                )
                for share in (0.5, 0.95)
            ],
        ),
        Panel(
            "Threads given and taken",
            "By the planner, where cpu_attn.elastic allows it.",
            "ops",
            [Query(rate("neoflex_cpu_attention_thread_changes_total", PLANNER, "direction"), "{{direction}}")],
        ),
        Panel(
            "Iterations with work for the CPU",
            "Of each service.",
            "ops",
            [Query(rate("neoflex_cpu_attention_iterations_total", HOST, "instance"), "{{instance}}")],
        ),
        Panel(
            "Pool, and what of the region lies in huge pages",
            "Without huge pages attention looks up more addresses; neoflex doctor says how to get them.",
            "bytes",
            [
                Query(f"neoflex_cpu_attention_pool_bytes{{{HOST}}}", "{{instance}} pool"),
                Query(f"neoflex_cpu_attention_huge_pages_bytes{{{HOST}}}", "{{instance}} in huge pages"),
            ],
        ),
        Panel(
            "Cores in use",
            "CPU time of each process.",
            "none",
            [
                Query(
                    "sum by (job, instance) (rate(process_cpu_time_seconds_total[$__rate_interval]))",
                    "{{job}} {{instance}}",
                )
            ],
            Look.STACKED,
        ),
    ],
)

_KV = Row(
    "KV",
    [
        Panel(
            "Blocks in use",
            "Share of each tier and pool that sequences own.",
            "percentunit",
            [
                Query(
                    f"sum by (tier, pool) (neoflex_kv_blocks_used{{{PLANNER}}})"
                    f" / (sum by (tier, pool) (neoflex_kv_blocks{{{PLANNER}}}) > 0)",
                    "{{tier}} {{pool}}",
                )
            ],
        ),
        Panel(
            "Blocks",
            "Those in use, and all there are.",
            "none",
            [
                Query(f"sum by (tier) (neoflex_kv_blocks_used{{{PLANNER}}})", "{{tier}} in use"),
                Query(f"sum by (tier) (neoflex_kv_blocks{{{PLANNER}}})", "{{tier}}"),
            ],
        ),
        Panel(
            "Sequences pushed out, and tokens computed again",
            "Preemptions a second; the second line is what they cost.",
            "ops",
            [
                Query(rate("neoflex_num_preemptions_total", PLANNER), "preemptions"),
                Query(rate("neoflex_recomputed_tokens_total", PLANNER), "tokens computed again"),
            ],
        ),
        Panel(
            "Memory of the processes",
            "Resident; the shared region counts in each that maps it.",
            "bytes",
            [Query("sum by (job, instance) (process_memory_usage_bytes)", "{{job}} {{instance}}")],
            width=12,
        ),
        Panel(
            "Epochs that ended, and failed iterations",
            "Each recomputes what runs. policy is the planner's own choice; the others are losses.",
            "none",
            [
                Query(
                    or_zero(f"sum by (reason) (increase(neoflex_epochs_ended_total{{{PLANNER}}}[$__rate_interval]))"),
                    "epoch ended: {{reason}}",
                ),
                Query(
                    or_zero(f"sum(increase(neoflex_failed_iterations_total{{{PLANNER}}}[$__rate_interval]))"),
                    "failed iterations",
                ),
            ],
            width=12,
        ),
    ],
)

PAGE = Page(
    "neoflex-machine",
    "NeoFlex: machine",
    "What GPU and CPU do, and where they wait for one another. docs/architecture.md explains the terms.",
    ("planner", "host"),
    (_ITERATIONS, _GPU, _CPU, _KV),
)
