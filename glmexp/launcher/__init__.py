"""How ranks are started and watched."""
