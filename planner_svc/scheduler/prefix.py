"""Names the content of full KV blocks, so that sequences that begin alike can share them.

The KV of a token depends on all tokens before it, so a block's key is a digest of its tokens and of the key before. It
is long enough that two contents never meet: a shared block is taken unseen.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from planner_svc.scheduler.blocks import Key

_DIGEST_BYTES = 16


def extend_keys(keys: list[Key], salt: str, token_ids: Sequence[int], block_tokens: int) -> None:
    """Adds the keys of full blocks that `keys`, of the same tokens' first blocks, lacks.

    `salt` parts tenants: contents under different ones are never shared.
    """
    parent = keys[-1] if keys else blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
    for end in range((len(keys) + 1) * block_tokens, len(token_ids) + 1, block_tokens):
        tokens = array("i", token_ids[end - block_tokens : end]).tobytes()
        parent = blake2b(tokens, digest_size=_DIGEST_BYTES, key=parent).digest()
        keys.append(parent)
