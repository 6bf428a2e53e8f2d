"""What the caller of `neoflex plan` can mend."""


class InputError(Exception):
    """A file or an argument cannot be used. The text names it, the field and the limit."""
