"""The endpoint picker: Envoy asks it over ext_proc which node serves a request. Needs the extra `picker`."""
