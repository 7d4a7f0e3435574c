"""One module per op: its torch kernels, fakes, autograd formula and public function."""
