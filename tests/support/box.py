"""A machine that exists on paper, as a simulation spec describes it."""

BOX = {
    "models": {"tiny": {"L": 4, "H": 1024, "nq": 16, "nkv": 4, "hd": 64, "inter": 2816, "V": 32000}},
    "profiles": {
        "box": {
            "model": "tiny",
            "F_gpu": 2e12,
            "eta_f": 0.5,
            "eta_a": 0.25,
            "B_gpu": 2e10,
            "eta_b": 0.8,
            "B_cpu": 1e10,
            "eta_c": 0.6,
            "B_link": 1e10,
            "t_launch": 5e-5,
            "t_seq": 1e-6,
            "t_hop": 5e-5,
            "t_iter": 1e-3,
            "gpu_blocks": 60,
            "bs": 16,
            "max_tokens": 512,
            "max_seqs": 128,
            "swap_gb": 0.5,
            "lnch_ms": 0.2,
            "slo_ttft": 0.5,
            "slo_tpot": 0.05,
        }
    },
}
"""Slow and small: a few hundred requests are simulated in a second."""
