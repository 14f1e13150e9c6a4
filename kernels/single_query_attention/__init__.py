"""`single_query_attention`: attention of one query over cached keys and values, read once."""
