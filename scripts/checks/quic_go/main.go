// Asks what it reads on standard input over HTTP/3, with quic-go, and writes the answers on standard output.
package main

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"sync"

	"github.com/quic-go/quic-go/http3"
)

type request struct {
	Body string `json:"body"`
	ID   string `json:"id"`
}

type answer struct {
	Status  int         `json:"status"`
	Headers http.Header `json:"headers"`
	Body    []byte      `json:"body"`
	Error   string      `json:"error"`
}

func ask(client *http.Client, url string, one request) answer {
	asked, err := http.NewRequest("POST", url, bytes.NewReader([]byte(one.Body)))
	if err != nil {
		return answer{Error: err.Error()}
	}
	asked.Header.Set("Content-Type", "application/json")
	asked.Header.Set("X-Request-Id", one.ID)
	response, err := client.Do(asked)
	if err != nil {
		return answer{Error: err.Error()}
	}
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return answer{Error: err.Error()}
	}
	return answer{response.StatusCode, response.Header, body, ""}
}

// Arguments: the URL, and a file with the certificate to trust.
func main() {
	pem, err := os.ReadFile(os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(pem)
	transport := &http3.Transport{TLSClientConfig: &tls.Config{RootCAs: trusted}}
	defer transport.Close()
	client := &http.Client{Transport: transport}
	var requests []request
	if err := json.NewDecoder(os.Stdin).Decode(&requests); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	answers := make([]answer, len(requests))
	gate := make(chan struct{}, 32)
	var waiting sync.WaitGroup
	for place, one := range requests {
		waiting.Add(1)
		gate <- struct{}{}
		go func() {
			defer waiting.Done()
			answers[place] = ask(client, os.Args[1], one)
			<-gate
		}()
	}
	waiting.Wait()
	json.NewEncoder(os.Stdout).Encode(answers)
}
