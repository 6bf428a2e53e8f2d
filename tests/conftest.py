"""For all tests."""

import os

# A console keeps the width that it finds when it is made; tests set theirs later.
os.environ.pop("COLUMNS", None)
