"""One module per op: its torch kernels, fakes, autograd formula and public function. Long torch kernels are in
``<family>_torch.py``; code that several ops share is in :mod:`liger._core`."""
