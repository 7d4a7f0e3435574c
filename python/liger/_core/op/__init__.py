"""What every op is made of: argument checks, backends, fakes, autograd, vmap."""
