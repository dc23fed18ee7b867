//! Sizes as people write them.

/// Bytes of `2GiB`, `500MB`, `4096`.
pub(crate) fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: f64 = number.parse().map_err(|_| format!("`{text}` is not a size; write 512MiB or 2GiB"))?;
    let factor = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kib" => 1024.0,
        "kb" => 1e3,
        "m" | "mib" => f64::from(1 << 20),
        "mb" => 1e6,
        "g" | "gib" => f64::from(1 << 30),
        "gb" => 1e9,
        "t" | "tib" => 1024.0 * f64::from(1 << 30),
        "tb" => 1e12,
        other => return Err(format!("`{other}` is not a unit; write KiB, MiB, GiB or TiB")),
    };
    Ok((number * factor) as u64)
}

/// `name=value` with a number.
pub(crate) fn resource(text: &str) -> Result<(String, f64), String> {
    let (name, value) = text.split_once('=').ok_or("write NAME=AMOUNT")?;
    let value = value.parse().map_err(|_| format!("`{value}` is not a number"))?;
    Ok((name.to_owned(), value))
}

/// `key=value`.
pub(crate) fn pair(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write KEY=VALUE")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Bytes for people.
pub(crate) fn shown(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", units[unit]) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_as_people_write_them() {
        assert_eq!(bytes("2GiB"), Ok(2 << 30));
        assert_eq!(bytes("1.5k"), Ok(1536));
        assert_eq!(bytes("4096"), Ok(4096));
        assert!(bytes("many").is_err());
        assert!(bytes("3 elephants").is_err());
        assert_eq!(shown(1536), "1.5 KiB");
    }
}
