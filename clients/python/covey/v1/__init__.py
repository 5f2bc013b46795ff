"""Generated from protos/covey/v1: the contract's messages, stubs and servicers."""
