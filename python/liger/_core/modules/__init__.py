"""Questions about modules: plain linear layers, hooks, quantised weights."""
