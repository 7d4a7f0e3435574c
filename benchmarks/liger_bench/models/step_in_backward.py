# SPDX-License-Identifier: BSD-3-Clause
"""Optimizer steps in the backward: every gradient is used and freed before the next one exists."""


class StepInBackward:
    """An optimizer for each parameter, whose hook makes its step as soon as the gradient is complete.

    ``make(parameters)`` returns an optimizer. ``step`` and ``zero_grad`` have nothing left to do, so it takes
    the place of one optimizer of all parameters.
    """

    def __init__(self, parameters, make):
        self._optimizers = []
        for parameter in parameters:
            optimizer = make([parameter])
            self._optimizers.append(optimizer)
            parameter.register_post_accumulate_grad_hook(self._hook(optimizer))

    @staticmethod
    def _hook(optimizer):
        def step(parameter):
            optimizer.step()
            parameter.grad = None

        return step

    @property
    def state(self):
        """{parameter: its states}"""
        return {p: state for optimizer in self._optimizers for p, state in optimizer.state.items()}

    def step(self):
        pass

    def zero_grad(self, set_to_none=True):
        pass
