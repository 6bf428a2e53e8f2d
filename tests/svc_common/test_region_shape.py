"""What a log line says of a region's shape."""

from svc_common.tensor_plane import RegionShape


def shape(**more: object) -> RegionShape:
    values: dict[str, object] = {
        "num_layers": 26,
        "num_q_heads": 4,
        "num_kv_heads": 1,
        "head_dim": 256,
        "block_tokens": 16,
        "kv_dtype": "int8",
        "exchange_dtype": "fp32",
        "max_sequences": 256,
        "softmax_scale": 0.0625,
    }
    return RegionShape(**{**values, **more})  # type: ignore[arg-type]


def test_it_is_one_short_line() -> None:
    text = "26 layers, 0 of them on the CPU, heads 4 / 1 of 256, blocks of 16 tokens in int8, exchanged in fp32"
    assert str(shape()) == f"{text}, at most 256 sequences"
    assert str(shape(sliding_windows=(0,) * 26)) == str(shape())
    windows = (512,) * 22 + (0,) * 4
    assert str(shape(sliding_windows=windows, softcap=50.0)) == (
        f"{text}, at most 256 sequences, windows of 512 tokens in 22 layers, softcap 50"
    )
