"""What planner and executor agree on about grammars: how much of a machine one may take."""

from llguidance import LLParserLimits

PARSER_LIMITS = LLParserLimits(verbose_errors=False)
"""llguidance's own limits, of about 50 ms a step; error texts without the grammar itself."""
