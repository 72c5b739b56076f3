"""The demonstration: chat streams and one long document, with chunked prefill off and on."""
