"""Between the contract's messages and the domain's values: named pairs, nothing else."""
