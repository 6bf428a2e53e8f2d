"""Says what an execution policy costs, finds the best one for a load, and when to change; no I/O, no clock."""

from planner_svc.policy.chooser import PolicyChange, PolicyChooser
from planner_svc.policy.estimate import PhaseEstimate, PolicyEstimator, Prediction, Timeline
from planner_svc.policy.explain import KIND_NAMES, layer_counts, layers_text, pair_text, reasons
from planner_svc.policy.figures import DecoderFigures, LayerFigures, decoder_figures
from planner_svc.policy.lanes import Lane, Segment, Step
from planner_svc.policy.machine import Link, Machine, Processor, RateCurve
from planner_svc.policy.measured import ServiceMemory, measured_figures, measured_machine
from planner_svc.policy.memory import MemoryUse, TierUse
from planner_svc.policy.mix import RequestMix
from planner_svc.policy.search import Comparison, NoPolicyError, PolicySearch

__all__ = [
    "KIND_NAMES",
    "Comparison",
    "DecoderFigures",
    "Lane",
    "LayerFigures",
    "Link",
    "Machine",
    "MemoryUse",
    "NoPolicyError",
    "PhaseEstimate",
    "PolicyChange",
    "PolicyChooser",
    "PolicyEstimator",
    "PolicySearch",
    "Prediction",
    "Processor",
    "RateCurve",
    "RequestMix",
    "Segment",
    "ServiceMemory",
    "Step",
    "TierUse",
    "Timeline",
    "decoder_figures",
    "layer_counts",
    "layers_text",
    "measured_figures",
    "measured_machine",
    "pair_text",
    "reasons",
]
