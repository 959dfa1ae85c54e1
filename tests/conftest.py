"""Settings shared by all tests."""

import torch

# Tests run in one process per core; more threads in each would only fight over the cores.
torch.set_num_threads(1)
