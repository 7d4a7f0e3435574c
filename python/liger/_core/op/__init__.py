"""The parts of every op: argument checks, backends, fakes, autograd, vmap."""
