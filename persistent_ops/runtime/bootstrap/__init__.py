"""How PEs find each other and exchange small messages on the host."""
