"""What every patched part uses: patched classes, trials, renamed functions, memory that is reused."""
