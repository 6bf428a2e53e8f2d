"""For all tests."""

import os

# A console keeps the width that it finds when it is made; tests set theirs later.
os.environ.pop("COLUMNS", None)
# Triton decides when it is imported, which torch may do.
os.environ["TRITON_INTERPRET"] = "1"
