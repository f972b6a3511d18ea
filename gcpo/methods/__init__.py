"""The methods of the four papers: a table of rows, and the functions that apply a row to rollouts."""

from gcpo.methods.apply import Modulation, advantages, base_advantages, expand, get_method, modulate, weights
from gcpo.methods.components import entirely_incorrect, is_correct
from gcpo.methods.table import BASES, METHODS, Method

__all__ = ["BASES", "METHODS", "Method", "Modulation", "advantages", "base_advantages", "entirely_incorrect", "expand"]
__all__ += ["get_method", "is_correct", "modulate", "weights"]
