"""Which attention functions agree: small cases, many libraries, one definition in float64."""
