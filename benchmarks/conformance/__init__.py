"""Agreement of attention functions in many libraries with one definition in float64."""
