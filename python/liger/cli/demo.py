"""Trains a Llama with and without liger on this machine and compares."""


def add_arguments(p):
    pass


def run(a):
    return 0
