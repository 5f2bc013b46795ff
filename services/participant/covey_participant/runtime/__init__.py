"""Runs model packages: wasmtime in worker processes of their own, and the parent's side of them."""
