//! Sizes as people write them.

/// Bytes of `2GiB`, `500MB`, `4096`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let size: Result<bytesize::ByteSize, _> = text.parse();
    size.map(|size| size.as_u64()).map_err(|_| format!("`{text}` is not a size; write 512MiB or 2GiB"))
}

/// A time such as `90s`, `10min` or `1h 30min`.
pub(crate) fn duration(text: &str) -> Result<std::time::Duration, String> {
    humantime::parse_duration(text).map_err(|error| format!("{error}; write 90s, 10min or 1h 30min"))
}

/// A time for people, without what nobody reads.
pub(crate) fn ago(time: std::time::Duration) -> String {
    let rounded = if time.as_secs() > 0 { std::time::Duration::from_secs(time.as_secs()) } else { time };
    humantime::format_duration(rounded).to_string()
}

/// `name=value` with a number.
pub(crate) fn resource(text: &str) -> Result<(String, f64), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=AMOUNT")?;
    let value = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
    Ok((name.to_owned(), value))
}

/// `N`, or `LEAST:MOST`.
pub(crate) fn range(text: &str) -> Result<(u32, u32), String> {
    let number = |text: &str| text.parse::<u32>().ok().filter(|number| *number > 0);
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least <= most => Ok((least, most)),
        (Some(least), Some(most)) => Err(format!("`{text}` is not LEAST:MOST; write {most}:{least}")),
        _ => Err(format!("`{text}` is neither a number above 0 nor LEAST:MOST")),
    }
}

/// `key=value`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Bytes for people.
pub(crate) fn shown(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("1.5KiB"), Ok(1536));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!((range("2"), range("1:4")), (Ok((2, 2)), Ok((1, 4))));
        assert!(range("0").is_err() && range("4:1").is_err() && range("x").is_err());
        assert!(bytes("many").is_err());
        assert!(bytes("3 elephants").is_err());
        assert_eq!(shown(1536), "1.5 KiB");
        assert_eq!(duration("1h 30min"), Ok(std::time::Duration::from_secs(5_400)));
        assert!(duration("soon").is_err());
    }
}
