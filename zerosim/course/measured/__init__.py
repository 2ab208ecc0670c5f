"""What a run really held, sent and computed, beside what pencil and paper say: the one place where the two meet."""

from zerosim.course.measured.activations import MeasuredActivations, measured_activations, measured_tensors
from zerosim.course.measured.plans import Compared, gpt_of, measured_row
from zerosim.course.measured.published import Settled, settled
from zerosim.course.measured.steps import (
           MeasuredBytes,
           MeasuredStep,
           bytes_per_parameter,
           measured_bytes,
           measured_step,
)

__all__ = ["Compared", "MeasuredActivations", "MeasuredBytes", "MeasuredStep", "Settled", "bytes_per_parameter",
           "gpt_of", "measured_activations", "measured_bytes", "measured_row", "measured_step", "measured_tensors",
           "settled"]
