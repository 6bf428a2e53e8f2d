"""Looks at this machine as the services will find it, and at the configuration's files. Reads only; starts nothing."""

from neoflex.doctor.examine import examine
from neoflex.doctor.finding import Finding, Level

__all__ = ["Finding", "Level", "examine"]
