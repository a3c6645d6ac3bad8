"""What two nodes say to each other. Moves bytes and typed messages; knows no models and no servers."""
