"""Generated: the validation rules' package, which generated code imports."""
