"""Who may still write: a lease says who is alive, a fence in each table refuses whoever was replaced."""
