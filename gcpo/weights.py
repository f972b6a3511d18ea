"""Strengths and forms of a group's weight, and the range that a method's weight can reach."""

from gcpo.methods.apply import weight_range
from gcpo.methods.forms import FORMS, alpha_g, boost, damp, damp_square, exponential, focal, reciprocal

__all__ = ["FORMS", "alpha_g", "boost", "damp", "damp_square", "exponential", "focal", "reciprocal", "weight_range"]
